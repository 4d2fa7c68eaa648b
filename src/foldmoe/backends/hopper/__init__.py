"""The Hopper backend: one persistent Gluon launch for MXFP4 routed and block-FP8 shared experts, activations in FP8.

| file | holds |
| --- | --- |
| ``backend.py``, ``supports.py`` | what the planner asks; need no Triton |
| ``packing.py``, ``pack.py``, ``pack_shared.py`` | stored weights to the kernel's layout and back |
| ``layer.py``, ``launch.py``, ``batch.py``, ``descriptors.py``, ``workspace.py`` | a call: prologue, launch, combine |
| ``heuristics.py`` | which tiles run a batch |
| ``kernels/`` | device code: ``folded.py`` is the launch, ``prologue.py`` and ``combine.py`` stand round it |
"""
