"""vLLM: the same ``vllm serve`` command, with the shared expert folded.

vLLM finds ``register`` by its entry point (``vllm.general_plugins``) in every process it starts. Two of vLLM's
pluggable classes are replaced, ``RoutedExperts`` and ``MoERunner``; a layer that cannot fold is left to vLLM, with the
reason.

| file | holds |
| --- | --- |
| ``plugin.py`` | ``register``, and whether it is active |
| ``versions.py`` | the vLLM versions that this was tried with |
| ``refusals.py`` | why a layer stays with vLLM, from its configuration |
| ``stored.py`` | how a layer's experts are stored, from vLLM's quantisation config |
| ``raw.py`` | parameters that take the checkpoint's tensors as they are, this rank's part |
| ``shared.py`` | vLLM's shared MLP as weights of ours |
| ``layers.py`` | the two classes that vLLM builds instead of its own |
| ``method.py`` | what runs a folded layer |
| ``reloading.py`` | new weights for a running server, refused |
| ``ahead.py`` | kernels compiled while the server starts |
| ``ranks.py`` | other ranks' tokens, and whose rows get the shared part |
| ``record.py`` | every layer's decision: log lines, agreement over ranks, the state file |
| ``advice.py`` | what ``foldmoe doctor`` says about the plugin and about a ``vllm serve`` command |
| ``deployments.py`` | two published deployments as commands |
"""

from foldmoe.integrations.vllm.plugin import register

__all__ = ["register"]
