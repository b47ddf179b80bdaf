"""What a server looks at before it says that it listens: options against the model, certificates, places for its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import logging
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import uvloop
import zmq
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from fake_engine import FakeEngine
from headrace import logs
from headrace.api.tls import tls_context
from headrace.cli import main, serve
from headrace.cli.fleet import RayFleet
from headrace.cli.port import KEEP_ALIVE, bind
from headrace.config import EngineConfig
from headrace.engine import socket_pair
from headrace.engine.build import build_engine
from headrace.engine.options import check_options
from headrace.engine.socket_pair import PREFIX, bind_pair
from headrace.errors import CapacityError, CheckpointError, HeadraceError, ParameterError
from headrace.logs import JsonLines, Lines
from headrace.model.checkpoint import resolve_checkpoint
from headrace.model.families import model_config_from_hf
from server_driver import SRC, ServerProcess
from test_http_heads import listening
from tiny_models import VOCAB, write_tiny


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    """Of another vocabulary."""
    return write_tiny("llama", tmp_path_factory.mktemp("other"), vocab_size=VOCAB + 2000)


@pytest.fixture
def never_starts(monkeypatch):
    """A command that comes as far as to start its core fails."""
    def start(self):
        raise AssertionError("it would have listened")

    monkeypatch.setattr("headrace.engine.client.EngineClient.start", start)


# ---------------------------------------------------------------- options

WRONG = [  # options, what the error begins with, the same for the library
    (["--max-model-len", "99999"], "--max-model-len: got 99999, allowed: at most 256", {"max_model_len": 99999}),
    (["--tensor-parallel-size", "4"], "--tensor-parallel-size: got 4, allowed: 1, 2 (what divides", {"tensor_parallel_size": 4}),
    (["--attention-backend", "fa3", "--device", "cpu"], "--attention-backend: got 'fa3', allowed: auto or torch",
     {"attention_backend": "fa3", "device": "cpu"}),
    (["--tensor-parallel-size", "2", "--quantization", "int8", "--device", "cpu"], "--quantization: got 'int8', allowed: none here",
     {"tensor_parallel_size": 2, "quantization": "int8", "device": "cpu"}),
    (["--num-speculative-tokens", "99"], "--num-speculative-tokens: got 99, allowed: an integer in [1, 64]", {"num_speculative_tokens": 99}),
    (["--kv-cache-bytes", "100"], "kv_cache_bytes = 100 holds 0 tokens", {"kv_cache_bytes": 100}),
    (["--kv-cache-bytes", "40000", "--max-model-len", "256"], "kv_cache_bytes = 40000 holds", {"kv_cache_bytes": 40000, "max_model_len": 256}),
    (["--speculative-method", "draft_model", "--speculative-model", "OTHER"], "--speculative-model: got",
     {"speculative_method": "draft_model", "speculative_model": "OTHER"}),
    (["--speculative-method", "eagle3", "--speculative-model", "./nowhere"], "directory nowhere does not exist",
     {"speculative_method": "eagle3", "speculative_model": "./nowhere"}),
    (["--num-speculative-tokens", "3"], "--num-speculative-tokens: got 3", {"num_speculative_tokens": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message", "fields"), WRONG, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_options_that_cannot_work_are_refused_before_it_listens(model, other, never_starts, capsys, caplog, options, message, fields):
    options = [str(other) if o == "OTHER" else o for o in options]
    with caplog.at_level(logging.INFO):
        assert main(["serve", model, "--port", "0", *options]) == 1
    assert capsys.readouterr().err.startswith(f"headrace: {message}")
    assert "listening" not in caplog.text
    # and the library says the same
    fields = {k: str(other) if v == "OTHER" else v for k, v in fields.items()}
    with pytest.raises((ParameterError, CapacityError, CheckpointError)):
        build_engine(EngineConfig(model=model, **fields))


@pytest.mark.parametrize(
    ("option", "value"), [("--metrics-prefix", "a b"), ("--stats-interval", "-1"), ("--trace", "/no/such/dir/t"), ("--heartbeat-timeout", "0")]
)  # fmt: skip
def test_bad_options_of_the_server_alone_are_refused(model, never_starts, capsys, option, value):
    assert main(["serve", model, "--port", "0", option, value]) == 1
    assert option.lstrip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--api-processes 2 --lora-dir .", "--lora-dir: got '.', allowed: none with several --api-processes"),
        ("--lora-dir ./nowhere", "--lora-dir: got './nowhere', allowed: a directory that is there"),
        ("--admin-key x", "--admin-key: got 'a key', allowed: none without --lora-dir or --lora"),
        ("--admin-key x --lora a=/x --api-processes 2", "--admin-key: got 'a key', allowed: none with several --api-processes"),
        ("--router round-robin", "--router: got 'round-robin', allowed: nothing where there is one core"),
        ("--glass-text --no-page", "--glass-text: got True, allowed: off without the page"),
        ("--allow-kill-core --no-page", "--allow-kill-core: got True, allowed: off without the page"),
        ("--override-generation-config {\"top_p\":2}", "--override-generation-config: top_p: got 2, allowed: a number in (0, 1]"),
        ("--override-generation-config {\"top_p\":\"a\"}", "--override-generation-config: top_p: got 'a', allowed: "),
    ],
)
def test_options_of_the_server_say_which_they_are(model, never_starts, capsys, options, said):
    assert main(["serve", model, "--port", "0", *options.split()]) == 1
    assert capsys.readouterr().err.startswith(f"headrace: {said}")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--ray --max-replicas 3 --data-parallel-size 2", "--data-parallel-size: got 2, allowed: nothing beside --max-replicas"),
        ("--ray --min-replicas 2", "--max-replicas: got None, allowed: an integer, with --min-replicas"),
        ("--ray --min-replicas 4 --max-replicas 2", "--max-replicas: got 2, allowed: an integer in [4, 256]"),
        ("--ray --min-replicas 0 --max-replicas 2", "--min-replicas: got 0, allowed: an integer in [1, 256]"),
        ("--placement-timeout 3", "--placement-timeout: got 3.0, allowed: nothing without --ray"),
    ],
)
def test_options_of_a_fleet_that_do_not_go_together_are_refused(model, never_starts, capsys, monkeypatch, options, said):
    monkeypatch.setattr("headrace.cli.fleet.require", lambda extra: None)  # whether Ray is installed or not
    assert main(["serve", model, "--port", "0", *options.split()]) == 1
    assert capsys.readouterr().err == f"headrace: {said}\n"


def test_a_model_that_nodes_find_by_its_path_is_called_as_it_was_given(model, capsys, monkeypatch):
    monkeypatch.setattr("headrace.cli.fleet.require", lambda extra: None)
    monkeypatch.setattr(RayFleet, "join", lambda self, options: EngineConfig(**options | {"model": model, "device": "cpu"}))
    monkeypatch.setattr(RayFleet, "supply", lambda self, *_: None)

    def start(self):
        raise HeadraceError(f"its name is {self.model_name}")

    monkeypatch.setattr("headrace.engine.client.EngineClient.start", start)
    monkeypatch.chdir(Path(model).parent)
    assert main(["serve", f"./{Path(model).name}", "--port", "0", "--ray"]) == 1
    assert capsys.readouterr().err.endswith(f"its name is ./{Path(model).name}\n")


def test_a_card_that_is_not_there_is_refused(model, never_starts, capsys, monkeypatch):
    monkeypatch.setattr("headrace.engine.options.cuda_driver", lambda: None)
    assert main(["serve", model, "--port", "0", "--device", "cuda"]) == 1
    assert capsys.readouterr().err.startswith("headrace: --device: got 'cuda', allowed: auto or cpu here")


def test_a_card_may_be_asked_for_where_there_is_a_driver(model, monkeypatch):
    config = EngineConfig(model=model, device="cuda", attention_backend="triton")
    checkpoint = resolve_checkpoint(config)
    options = config, checkpoint, model_config_from_hf(checkpoint.config)

    def library(name: str) -> str:
        if not there:
            raise OSError(f"{name}: cannot open shared object file")
        return name

    monkeypatch.setattr("headrace.machine.ctypes.CDLL", library)
    there = True
    check_options(*options)
    there = False
    with pytest.raises(ParameterError, match="no NVIDIA driver"):
        check_options(*options)


def test_weights_that_are_not_there_are_found_before_it_listens(tmp_path, never_starts, capsys, caplog):
    path = write_tiny("llama", tmp_path)
    next(path.glob("*.safetensors")).unlink()
    with caplog.at_level(logging.INFO):
        assert main(["serve", str(path), "--port", "0"]) == 1
    assert str(path) in capsys.readouterr().err and "listening" not in caplog.text


@pytest.mark.parametrize("loop", [asyncio, uvloop])
def test_ctrl_c_before_it_listens_ends_it_there(monkeypatch, loop):
    """Not when something waits for the first time: by then half of the server would run, and its end would be tracebacks."""
    went_on = []

    class Server:
        def __init__(self, *arguments: object):
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):
                pass
            went_on.append(True)

    async def nobody(*arguments: object) -> None:
        return None

    monkeypatch.setattr(serve, "Server", Server)
    monkeypatch.setattr(serve, "early_core", nobody)
    with pytest.raises(KeyboardInterrupt):
        loop.run(serve.serve(None, None, [], 0.0, ""))  # type: ignore[arg-type]
    assert not went_on


def test_the_check_needs_no_torch(model):
    code = "import sys; import headrace.engine.client; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(SRC)}, check=True, timeout=60)


def test_the_embedded_model_has_one_name(smollm2):
    from headrace.cli.chat_backends import EMBEDDED

    assert resolve_checkpoint(EngineConfig()).name == EMBEDDED == "SmolLM2-135M-Instruct"


# ---------------------------------------------------------------- TLS


def write_key(path: Path, password: bytes | None = None, key=None):
    key = key or ec.generate_private_key(ec.SECP256R1())
    how = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how))
    return key


def write_certificate(path: Path, key) -> None:
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")]), datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    made = made.not_valid_before(now - day).not_valid_after(now + day)
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    path.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Path:
    """A directory of certificates and keys, good and bad."""
    path = tmp_path_factory.mktemp("tls")
    key = write_key(path / "key")
    write_certificate(path / "cert", key)
    write_key(path / "another-key")
    write_key(path / "locked-key", b"secret", key)
    small = write_key(path / "small-key", key=rsa.generate_private_key(65537, 1024))
    write_certificate(path / "small-cert", small)
    (path / "both").write_bytes((path / "cert").read_bytes() + (path / "key").read_bytes())
    (path / "both-locked").write_bytes((path / "cert").read_bytes() + (path / "locked-key").read_bytes())
    (path / "text").write_text("no certificate")
    (path / "empty").touch()
    (path / "directory").mkdir()
    return path


@pytest.mark.parametrize(
    ("certificate", "key", "option", "words"),
    [
        ("text", "key", "--ssl-certfile", "PEM form"), ("empty", "key", "--ssl-certfile", "PEM form"),
        ("key", "key", "--ssl-certfile", "PEM form"), ("missing", "key", "--ssl-certfile", "No such file"),
        ("directory", "key", "--ssl-certfile", "Is a directory"),
        ("small-cert", "small-key", "--ssl-certfile", "too small"), ("both-locked", None, "--ssl-certfile", "without a password"),
        ("cert", "text", "--ssl-keyfile", "PEM form"), ("cert", "empty", "--ssl-keyfile", "PEM form"),
        ("cert", "cert", "--ssl-keyfile", "PEM form"), ("cert", "missing", "--ssl-keyfile", "No such file"),
        ("cert", "directory", "--ssl-keyfile", "Is a directory"),
        ("cert", "another-key", "--ssl-keyfile", "which is another"), ("cert", "locked-key", "--ssl-keyfile", "without a password"),
        ("cert", None, "--ssl-keyfile", "holds none"), (None, "key", "--ssl-keyfile", "nothing without --ssl-certfile"),
    ],
)  # fmt: skip
def test_a_certificate_that_cannot_serve_is_refused_at_once(model, tls, never_starts, capsys, caplog, certificate, key, option, words):
    given = ["--ssl-certfile", str(tls / certificate)] if certificate is not None else []
    given += ["--ssl-keyfile", str(tls / key)] if key is not None else []
    with caplog.at_level(logging.INFO):
        assert main(["serve", model, "--port", "0", *given]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"headrace: {option}: got ") and words in error and error.count("\n") == 1
    assert "listening" not in caplog.text


def test_a_file_without_permission_is_named(tls, monkeypatch):
    def refuse(self, *_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("headrace.api.tls._check_readable", lambda option, path: None)
    monkeypatch.setattr("ssl.SSLContext.load_cert_chain", refuse)
    with pytest.raises(ParameterError, match="--ssl-"):
        tls_context(str(tls / "cert"), str(tls / "key"))


@pytest.mark.parametrize("loop", [asyncio, uvloop])
def test_who_does_not_shake_hands_takes_nobodys_place(tls, monkeypatch, loop):
    """However many connect and say nothing, or no TLS: who comes behind them is served, and they go."""
    context, client = tls_context(str(tls / "cert"), str(tls / "key")), ssl.create_default_context(cafile=str(tls / "cert"))

    async def health(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname="localhost")
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        said = await reader.read()
        writer.close()
        return said

    async def play() -> None:
        async with listening(monkeypatch, FakeEngine(), context, room_for_connections=lambda: 2, BEYOND=2) as port:
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(12)]
            for _, writer in silent[6:8]:
                writer.write(b"GET /health HTTP/1.1\r\n\r\n")
            for said in await asyncio.gather(*[health(port) for _ in range(4)]):
                assert said.startswith(b"HTTP/1.1 200")
            for reader, _ in silent[:6]:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""

    loop.run(asyncio.wait_for(play(), 60))


@pytest.mark.parametrize("files", [("cert", "key"), ("both",)])
def test_https(model, tls, tmp_path, files):
    """A real handshake, the certificate checked by the client; plain HTTP at the same port gets nothing."""
    options = [o for pair in zip(("--ssl-certfile", "--ssl-keyfile"), files, strict=False) for o in (pair[0], str(tls / pair[1]))]
    with ServerProcess(model, "--host", "localhost", "--log-format", "json", *options, tmp=tmp_path) as server:
        port = server.url.rpartition(":")[2]
        with httpx.Client(base_url=f"https://localhost:{port}", verify=str(tls / "cert"), timeout=30) as client:
            assert client.get("/health").status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{port}/health", timeout=10)
        with pytest.raises(httpx.ConnectError):  # signed by nobody that this machine trusts
            httpx.get(f"https://localhost:{port}/health", timeout=10)
        assert server.terminate() == 0
        lines = [json.loads(line) for line in server.log().splitlines()]  # every line, the libraries' too
    assert {"listening on", "ended"} <= {" ".join(line["message"].split()[:2]) for line in lines}
    assert all(line["level"] == "INFO" and line["process"] == "server" for line in lines)


# ---------------------------------------------------------------- places for the sockets


def bound() -> Path:
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    try:
        return bind_pair(inbox, outbox)
    finally:
        context.destroy(linger=0)


def test_a_long_tmpdir_does_whatever_its_length(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        for length in (*range(60, 110), 130, 250):
            place = Path(base) / ("x" * (length - len(base) - 1))
            place.mkdir()
            monkeypatch.setattr(tempfile, "tempdir", str(place))
            home = bound()
            assert home.stat().st_mode & 0o777 == 0o700 and len(os.fsencode(home / "out")) <= 107
            assert not [p for p in place.iterdir() if p != home]  # no remains where it failed
            shutil.rmtree(home)


@pytest.mark.parametrize("place", ["/proc", "/no/such/place", "/dev/null"])
def test_a_tmpdir_that_cannot_be_used(monkeypatch, place):
    monkeypatch.setattr(tempfile, "tempdir", place)
    home = bound()
    assert home.parent in (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"))
    shutil.rmtree(home)


def test_no_place_at_all_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(socket_pair, "places", lambda: ["/proc", "/no/such/place"])
    with pytest.raises(HeadraceError, match=r"no place for the sockets .*TMPDIR.*/proc .*, /no/such/place \(No such file"):
        bound()


def test_a_server_with_a_long_tmpdir(model, tmp_path):
    place = tmp_path / ("x" * 130)
    place.mkdir()
    with ServerProcess(model, tmp=place) as server:
        server.wait_ready()
        assert server.terminate() == 0
        assert "Traceback" not in server.log() and not list(place.glob(f"{PREFIX}*"))


# ---------------------------------------------------------------- the log


def test_json_lines_hold_whatever_is_logged():
    try:
        raise ValueError('two\nlines "quoted" \ud800')
    except ValueError:
        record = logging.LogRecord("a.b", logging.ERROR, "", 0, "%s\nfailed", ("x",), sys.exc_info())
    line = JsonLines("core").format(record)
    fields = json.loads(line)
    assert "\n" not in line and fields["message"] == "x\nfailed" and fields["process"] == "core" and fields["logger"] == "a.b"
    assert "ValueError" in fields["exception"] and fields["level"] == "ERROR" and fields["time"].endswith("Z")


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_log_that_nobody_takes_holds_nobody_up(kind):
    """A terminal that is stopped, a pager that waits, a journal that hangs: whoever writes to them waits for ever."""
    reading, writing = log_reader(kind)
    with open(writing, "w") as stream, open(reading):
        handler = Lines()
        handler.setStream(stream)
        handler.setFormatter(JsonLines("server"))
        logger = logging.Logger("x")
        logger.addHandler(handler)
        for number in range(400):
            logger.warning("%d %s", number, "long " * 100)
        assert os.get_blocking(writing), "it is others' stderr, too"
        os.set_blocking(reading, False)
        first = os.read(reading, 1 << 20).decode()
        assert 3000 < len(first) < 400 * 600
        logger.warning("é" * 2500)
        stream.close()
        rest = os.read(reading, 1 << 20).decode()
    lines = [json.loads(line)["message"] for line in (first + rest).splitlines() if line.endswith("}")]
    lost = [int(line.split()[0]) for line in lines if line.endswith(" lines of the log were not taken, and are lost")]
    assert lines[-1] == "é" * 2500 and " lost" in lines[-2] and sum(" long" in line for line in lines) + sum(lost) == 400 > lost[-1] > 100


def log_reader(kind: str) -> tuple[int, int]:
    """Both ends of what a log may be written to."""
    if kind == "pipe":
        return os.pipe()
    ends = socket.socketpair()  # as systemd gives a service to its journal
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    return ends[0].detach(), ends[1].detach()


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_a_log_that_is_taken_slowly_holds_up_a_fiftieth_of_the_time(monkeypatch, kind):
    reading, writing = log_reader(kind)
    clock, slept = [0.0], []

    def sleep(seconds: float) -> None:  # as long as it takes the reader to take a line or so
        clock[0] += seconds
        slept.append(seconds)
        os.read(reading, 600)

    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    with open(writing, "w") as stream, open(reading):
        handler = Lines()
        handler.setStream(stream)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger = logging.Logger("x")
        logger.addHandler(handler)
        for _ in range(1000):
            logger.warning("long " * 100)
            clock[0] += 0.05
            assert sum(slept) <= logs.PATIENCE + logs.REFILL * clock[0] + 0.011
    assert sum(slept) > 2 * logs.PATIENCE, "it was slow, and waited for"


def test_one_form_of_lines_and_probes_only_when_debugging(model, tmp_path):
    with ServerProcess(model, "--log-level", "info", tmp=tmp_path) as server:
        server.wait_ready()
        server.http.get("/metrics")
        body = {"model": model, "prompt": "x", "max_tokens": 2}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        assert server.terminate() == 0
        lines = server.log().splitlines()
    stamped = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR) (server|core): "
    odd = [line for line in lines if not re.match(stamped, line) and not line.startswith(" ")]
    assert not odd and any(" core: " in line for line in lines)
    assert sum(" POST /v1/completions 200 " in line for line in lines) == 1
    assert not any("/ready" in line or "/metrics" in line or "/health" in line for line in lines)


# ---------------------------------------------------------------- its port


def test_a_client_that_is_gone_without_a_word_is_noticed():
    """And what stands between does not forget who waits long for an answer: each connection asks now and then."""
    [listener] = bind("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()) as client, listener.accept()[0] as accepted:
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert [accepted.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in KEEP_ALIVE] == list(KEEP_ALIVE.values())
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
