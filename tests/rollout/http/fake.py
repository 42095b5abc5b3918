"""A server that answers as vLLM's and SGLang's do, with a policy of random numbers in place of a model.

The shapes of requests and answers are those that vllm 0.32.0 was seen to take and give, and those of sglang 0.5.23's
documentation and sources.
"""

# Shape letters: V vocabulary.

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

VOCAB = 258
"""Of `tests.rollout.tiny`, which imports torch: as a program of its own this must start at once."""

Fault = Callable[["Handler"], None]


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    """With five, the usual number, more that connect at once wait a second for their next try."""


def policy_logits(weights: float, token_ids: list[int]) -> NDArray[np.float64]:
    """[V]: of the next token. `weights` stands for all of a model's."""
    words = repr((weights, token_ids)).encode()
    seed = int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
    return np.random.default_rng(seed).normal(size=VOCAB) * 2


def policy_logprobs(weights: float, token_ids: list[int], temperature: float) -> NDArray[np.float64]:
    """[V]."""
    logits_V = policy_logits(weights, token_ids) / temperature
    return logits_V - np.log(np.exp(logits_V).sum())


@dataclass
class FakeServer:
    """Listens on a port of its own in threads of its own until `close`."""

    port: int = 0
    token_s: float = 0.0
    """Time of each token."""

    chunk: int = 3
    """Tokens of one event."""

    version: str = "0.32.0"
    max_model_len: int = 256
    scales_logprobs: bool = True
    is_incremental: bool = False
    """SGLang's other way: events hold the new tokens, not all."""

    faults: dict[str, Fault] = field(default_factory=dict)
    """By path, what is done in place of the answer. Removed by whoever put it there."""

    is_healthy: bool = True
    weights: float = 0.0
    """The first number of the first tensor that was loaded last."""

    weight_name: str = "default"
    num_loads: int = 0
    is_paused: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of requests that generate."""

    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    """The Authorization of each request."""

    num_pauses: int = 0

    def __post_init__(self) -> None:
        self._http = _Server(("127.0.0.1", self.port), Handler)
        self._http.daemon_threads = True
        cast(Any, self._http).fake = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def load(self, folder: Path) -> None:
        """As a server reads a model folder: whole, or not at all."""
        assert json.loads((folder / "config.json").read_text())["architectures"]
        files = sorted(folder.glob("*.safetensors"))
        assert files and not folder.name.endswith(".partial")
        with safe_open(files[0], "np") as tensors:
            self.weights = float(tensors.get_tensor(sorted(tensors.keys())[0]).flatten()[0])
        self.num_loads += 1

    def draw(self, body: "Request") -> Iterator[tuple[list[int], list[float], str | None]]:
        """Tokens, log-probs and the reason of the end, in pieces."""
        rng = np.random.default_rng(body.seed)
        token_ids, pending, start = list(body.token_ids), ([], []), self.num_pauses
        while self.is_paused:
            time.sleep(0.005)
        start = self.num_pauses
        for count in range(1, body.max_tokens + 1):
            time.sleep(self.token_s)
            if self.num_pauses != start:
                yield *pending, "abort"
                return
            logprobs_V = policy_logprobs(self.weights, token_ids, body.temperature or 1.0)
            token = int(logprobs_V.argmax()) if body.temperature == 0 else int(rng.choice(VOCAB, p=np.exp(logprobs_V)))
            given_V = logprobs_V if self.scales_logprobs else policy_logprobs(self.weights, token_ids, 1.0)
            token_ids.append(token)
            pending[0].append(token)
            pending[1].append(float(given_V[token]))
            end = "stop" if token in body.stop_token_ids else "length" if count == body.max_tokens else None
            if end is not None or len(pending[0]) >= self.chunk:
                yield *pending, end
                pending = ([], [])
            if end is not None:
                return


@dataclass(frozen=True)
class Request:
    """What both kinds of server ask for, in one form."""

    token_ids: list[int]
    max_tokens: int
    temperature: float
    stop_token_ids: list[int]
    seed: int


class Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"

    @property
    def fake(self) -> FakeServer:
        return cast(Any, self.server).fake

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._handle({})

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._handle(json.loads(text) if text else {})

    def send_json(self, answer: Any, status: int = 200) -> None:
        self.send_text(json.dumps(answer), status)

    def send_text(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def begin_events(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

    def send_event(self, event: Any) -> None:
        text = event if isinstance(event, str) else json.dumps(event)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def _handle(self, body: dict[str, Any]) -> None:
        path = urlsplit(self.path).path
        self.fake.paths.append(path)
        self.fake.keys.append(self.headers.get("Authorization"))
        try:
            fault = self.fake.faults.get(path)
            if fault is not None:
                fault(self)
                return
            self._answer(path, body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _answer(self, path: str, body: dict[str, Any]) -> None:
        fake = self.fake
        match path:
            case "/health":
                self.send_text("", 200 if fake.is_healthy else 503)
            case "/version":
                self.send_json({"version": fake.version})
            case "/get_server_info":
                self.send_json({"version": fake.version, "weight_version": fake.weight_name})
            case "/v1/models":
                self.send_json({"object": "list", "data": [{"id": "policy", "max_model_len": fake.max_model_len}]})
            case "/is_paused":
                self.send_json({"is_paused": fake.is_paused})
            case "/pause":
                assert parse_qs(urlsplit(self.path).query)["mode"] == ["abort"]
                self._pause({"status": "paused"})
            case "/pause_generation":
                assert body == {"mode": "abort"}
                self._pause({"status": "ok"})
            case "/resume" | "/continue_generation":
                fake.is_paused = False
                self.send_json({"status": "resumed"})
            case "/collective_rpc":
                assert body["method"] == "reload_weights" and fake.is_paused
                fake.load(Path(body["kwargs"]["weights_path"]))
                self.send_json({"results": [None]})
            case "/reset_prefix_cache":
                self.send_json({"success": True})
            case "/update_weight_version":
                fake.weight_name = body["new_version"]
                self.send_json({"success": True, "new_version": fake.weight_name})
            case "/update_weights_from_disk":
                assert body["abort_all_requests"] is False and fake.is_paused
                fake.load(Path(body["model_path"]))
                fake.weight_name = body["weight_version"]
                self.send_json({"success": True, "message": "Succeeded to update model weights.", "num_paused": 0})
            case "/v1/completions":
                self._complete(body)
            case "/generate":
                self._generate(body)
            case _:
                self.send_json({"detail": "Not Found"}, 404)

    def _pause(self, answer: Any) -> None:
        self.fake.is_paused = True
        self.fake.num_pauses += 1
        time.sleep(0.02)  # what was drawn is on its way
        self.send_json(answer)

    def _scores(self, token_ids: list[int]) -> list[float]:
        return [
            float(policy_logprobs(self.fake.weights, token_ids[:index], 1.0)[token_ids[index]])
            for index in range(1, len(token_ids))
        ]

    def _complete(self, body: dict[str, Any]) -> None:
        if "prompt_logprobs" in body:
            tokens = body["prompt"]
            scores = self._scores(tokens)
            entries = [{str(t): {"logprob": s, "rank": 1}} for t, s in zip(tokens[1:], scores, strict=True)]
            self.send_json({"choices": [{"index": 0, "prompt_logprobs": [None, *entries]}]})
            return
        assert body["return_token_ids"] and body["ignore_eos"] and body["stream"] and body["top_k"] == 0
        self.fake.bodies.append(body)
        request = Request(body["prompt"], body["max_tokens"], body["temperature"], body["stop_token_ids"], body["seed"])
        self.begin_events()
        for tokens, logprobs, end in self.fake.draw(request):
            found = {"token_logprobs": logprobs, "tokens": [f"token_id:{t}" for t in tokens], "text_offset": []}
            choice = {"index": 0, "text": "", "logprobs": found if tokens else None, "token_ids": tokens}
            choice |= {"finish_reason": end, "stop_reason": None}
            self.send_event({"id": "cmpl-1", "object": "text_completion", "model": "policy", "choices": [choice]})
        self.send_event("[DONE]")

    def _generate(self, body: dict[str, Any]) -> None:
        if body["logprob_start_len"] == 0:
            scores = self._scores(body["input_ids"])
            entries = [[None, body["input_ids"][0], None]]
            entries += [[s, t, None] for t, s in zip(body["input_ids"][1:], scores, strict=True)]
            self.send_json({"text": "", "meta_info": {"input_token_logprobs": entries, "completion_tokens": 1}})
            return
        self.fake.bodies.append(body)
        asked = body["sampling_params"]
        assert body["stream"] and asked["top_k"] == -1 and asked["ignore_eos"]
        request = Request(
            body["input_ids"],
            asked["max_new_tokens"],
            asked["temperature"],
            asked["stop_token_ids"],
            asked["sampling_seed"],
        )
        so_far: list[Any] = []
        self.begin_events()
        for tokens, logprobs, end in self.fake.draw(request):
            new = [[logprob, token, None] for token, logprob in zip(tokens, logprobs, strict=True)]
            so_far += new
            meta = {"id": body["rid"], "finish_reason": None if end is None else {"type": end}}
            meta["completion_tokens"] = len(so_far)
            meta["output_token_logprobs"] = new if self.fake.is_incremental else list(so_far)
            self.send_event({"text": "", "output_ids": [entry[1] for entry in so_far], "meta_info": meta})
        self.send_event("[DONE]")
