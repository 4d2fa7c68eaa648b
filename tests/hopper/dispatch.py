"""Triton's dispatch of warps and nothing else: what racecheck says of roles that share no memory.

    for m in 0 1 2; do compute-sanitizer --tool racecheck python -m tests.hopper.dispatch $m; done

Each role writes a word of its own to global memory. What the kernel keeps in shared memory is the word that names a
warp's next role, as Triton's ``warp_specialize`` compiles it for any kernel, and an mbarrier. With 1 each role has a
barrier of its own warps in between, with 2 one role tells the others by the mbarrier.

compute-sanitizer 2025.3.1 on an H200 reported nothing for 0 and one hazard each for 1 and 2, the word's reads against
its last write, as it does of the folded launch: a barrier of all threads lies between them in all three. 2026.4.0
reported nothing for any of them.
"""

import sys

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROLES = 4
CTAS = 4


@gluon.jit
def _role(out, base, told, role: gl.constexpr, between: gl.constexpr):
    if between == 1:
        gl.thread_barrier()
    if between == 2:
        if role == 0:
            mbarrier.arrive(told, count=1)
        else:
            mbarrier.wait(told, 0)
    gl.store(out + base + role, base + role + 1)


@gluon.jit
def dispatched(out, between: gl.constexpr):
    base = gl.program_id(0) * 4
    told = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(told, count=1)
    gl.warp_specialize(
        [
            (_role, (out, base, told, 0, between)),
            (_role, (out, base, told, 1, between)),
            (_role, (out, base, told, 2, between)),
            (_role, (out, base, told, 3, between)),
        ],
        [4, 1, 1],
        [24, 24, 24],
    )


def main(between: int) -> None:
    """One launch, and whether every role ran."""
    out = torch.zeros(CTAS * ROLES, dtype=torch.int32, device="cuda")
    dispatched[(CTAS,)](out, between, num_warps=4)
    torch.cuda.synchronize()
    assert out.tolist() == list(range(1, CTAS * ROLES + 1)), out.tolist()
    print(f"{CTAS * ROLES} roles ran, triton {triton.__version__}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
