"""Stands in for ``vllm serve`` with our plugin: answers, writes its rank's state, and fails in the ways asked for.

Standard library alone, so that it starts at once. ``--fault NAME``, or ``NAME:FOLD`` for that FOLDMOE_FOLD alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

RUNS = {"native": "folded", "auto": "folded", "slot": "folded", "off": "serial", "dual": "dual-stream"}

options = argparse.ArgumentParser()
options.add_argument("--port", type=int, required=True)
options.add_argument("--fault", action="append", default=[])
options.add_argument("--once", help="a file: faults happen only while it does not exist, and make it")
options.add_argument("--milliseconds", default="", help="FOLD=N,...: what a request takes")
arguments = options.parse_args()

fold = os.environ.get("FOLDMOE_FOLD", "auto")
faults = {name for name, _, only in (fault.partition(":") for fault in arguments.fault) if only in ("", fold)}
delays = dict(pair.split("=") for pair in arguments.milliseconds.split(",") if pair)
delay = float(delays.get(fold, 1)) / 1e3
runs = RUNS.get(fold, "stock")
answered, lock = 0, threading.Lock()


def log(line: str) -> None:
    print(line, flush=True)


def fault(name: str) -> bool:
    if name not in faults:
        return False
    if arguments.once:
        if Path(arguments.once).exists():
            return False
        Path(arguments.once).touch()
    return True


def write_state() -> None:
    arm = "stock" if fault("wrong-arm") else "mixed" if fault("mixed") else runs
    layer = {"layer": "model.layers.1.mlp.experts", "arm": runs, "reasons": [], "digest": "d"}
    refused = {
        "layer": "model.layers.2.mlp.experts",
        "arm": "stock",
        "reasons": ["model.layers.2.mlp.experts: shared expert is opaque"],
        "digest": "e",
    }
    stream = runs == "stock" and os.environ.get("VLLM_DISABLE_SHARED_EXPERTS_STREAM") != "1"
    state = {
        "schema": 1,
        "pid": os.getpid(),
        "rank": 0,
        "world_size": 1,
        "versions": {"foldmoe": "0", "vllm": "0.32.0", "torch": "2"},
        "arm": arm,
        "arm_run": arm,
        "asked": {"fold": fold},
        "stock_shared_stream": stream and "no-stream" not in faults,
        "layers": [layer, refused] if arm == "mixed" else [layer | {"arm": arm}],
        "digest": "d",
        "model_load_bytes": 3 * 2**20,
        "workspace_bytes": 2**20,
        "kv_blocks": 77,
        "complete": True,
    }
    folder = Path(os.environ["FOLDMOE_STATE_DIR"])
    (folder / "rank-0.json").write_text(json.dumps(state))


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def reply(self, body: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        pages = {
            "/health": "",
            "/version": json.dumps({"version": "0.32.0+fake"}),
            "/metrics": f'vllm:prefix_cache_queries_total{{engine="0"}} {answered * 10}\n'
            f'vllm:prefix_cache_hits_total{{engine="0"}} {answered * 5 if "cache-hits" in faults else 0}\n'
            'vllm:cache_config_info{engine="0",num_gpu_blocks="77"} 1.0\n',
        }
        if "never-healthy" in faults and self.path == "/health":
            self.reply("", 503)
        else:
            self.reply(pages.get(self.path, ""), 200 if self.path in pages else 404)

    def do_POST(self) -> None:
        global answered
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            answered += 1
            number = answered
        if "crash" in faults and number == 3 and fault("crash"):
            log("RuntimeError: an illegal memory access was encountered")
            os._exit(1)
        if "hang" in faults:
            time.sleep(60)
        time.sleep(delay)
        if "slow-first" in faults and number == 1:
            time.sleep(0.5)
        if "compile" in faults and asked["index"] == 2 and not asked["warm"] and fault("compile"):
            line = "Triton kernel JIT compilation during inference: _gemm_kernel. This causes a latency spike; consider"
            log(f"(EngineCore pid=7) WARNING 11-29 18:00:00 [jit_monitor.py:140] {line} extending warmup.")
            time.sleep(2)
        tokens = asked["tokens"]
        if "short" in faults and asked["index"] % 3 != 2:
            tokens -= 1
        text = f"{asked['seed']} {asked['index']}"
        if "other-texts" in faults:
            text += " <eof> 99"
        failed = "failing" in faults and asked["index"] == 0
        self.reply(json.dumps({"text": text, "tokens": tokens}), 500 if failed else 200)


def main() -> None:
    log(f"fake server, fold {fold}")
    if fault("broken"):
        log("(EngineCore pid=7) ERROR 11-29 18:00:00 [core.py:1] ValueError: unknown quantization method mxfp9")
        sys.exit(1)
    if fault("out-of-memory"):
        log("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
        sys.exit(1)
    if fault("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if "untuned" in faults:
        log("WARNING 11-29 18:00:00 [fused_moe.py:1] Using default MoE config. Performance might be sub-optimal! "
            "Config file not found at /configs/E=385,N=2048,device_name=H200.json")  # fmt: skip
    if "no-state" not in faults:
        write_state()
    if "stubborn" in faults:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "children" in faults:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        log(f"child {child.pid}")
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(0)
