"""The fake server as a program, started as vLLM's is: `python serve_fake.py [--behaviour X] --model DIR --port N`."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.rollout.http.fake import FakeServer


def main(arguments: list[str]) -> None:
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    behaviour = options.get("--behaviour", "")
    if behaviour == "fails":
        print("Traceback (most recent call last):\nRuntimeError: no kernel for head_dim=8\nbye", flush=True)
        sys.exit(3)
    if behaviour == "sleeps":
        print("loading ...", flush=True)
        time.sleep(100)
    if behaviour == "ignores":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Servers have workers, which must not outlive them.
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    print(f"server {os.getpid()} worker {worker.pid} dev {os.environ.get('VLLM_SERVER_DEV_MODE')}", flush=True)
    server = FakeServer(port=int(options["--port"]), token_s=float(options.get("--token-s", "0")))
    server.load(Path(options["--model"]))
    while True:
        time.sleep(1)


if __name__ == "__main__":
    sys.argv = [each for each in sys.argv if each != "--enable-prefix-caching"]
    main(sys.argv[1:])
