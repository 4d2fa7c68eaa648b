"""`vllm bench serve` that imports vLLM once: a fork for each run saves some 15 s, and nothing that is measured.

python examples/forking_client.py --listen SOCKET &    # until it is stopped
foldmoe bench serve --client-cmd "python -S -E examples/forking_client.py --socket SOCKET" ...
"""

import json
import os
import socket
import sys
from typing import Any

_LONGEST = 1 << 20


def listen(path: str) -> None:
    """Answer every run from here on, each in a fork with the caller's output, folder and environment."""
    from vllm.benchmarks import datasets, serve  # noqa: F401  # loaded before the first fork
    from vllm.entrypoints.cli.benchmark.serve import BenchmarkServingSubcommand as Command
    from vllm.tokenizers import get_tokenizer  # noqa: F401
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def run(asked: dict[str, Any]) -> int:
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        parser = FlexibleArgumentParser(prog="vllm bench serve")
        Command.add_cli_args(parser)
        try:
            Command.cmd(parser.parse_args(asked["arguments"]))
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 1
        return 0

    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        print(f"listening at {path}", flush=True)
        while True:
            caller, _ = door.accept()
            message, files, _, _ = socket.recv_fds(caller, _LONGEST, 2)
            if not os.fork():
                for number, file in enumerate(files, start=1):
                    os.dup2(file, number)
                status = run(json.loads(message))
                sys.stdout.flush()
                sys.stderr.flush()
                caller.sendall(bytes([status & 255]))
                os._exit(0)
            caller.close()
            for file in files:
                os.close(file)
            while _a_run_ended():
                pass


def _a_run_ended() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def call(path: str, arguments: list[str]) -> int:
    """One run's exit status."""
    asked = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(path)
        socket.send_fds(door, [json.dumps(asked).encode()], [1, 2])
        answer = door.recv(1)
    return answer[0] if answer else 1  # a fork that was killed answers nothing


def main() -> None:
    match sys.argv[1:]:
        case ["--listen", path]:
            listen(path)
        case ["--socket", path, *arguments]:
            sys.exit(call(path, arguments))
        case _:
            sys.exit((__doc__ or "").strip())


if __name__ == "__main__":
    main()
