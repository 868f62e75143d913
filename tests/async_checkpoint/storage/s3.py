"""A real S3 server for tests: a process on a port of 127.0.0.1, and queries of its content."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec.asyn
from s3fs import S3FileSystem

SERVER = Path(__file__).parents[1] / "scripts" / "s3_server.py"
BUCKET = "checkpoints"


class Server:
    """The server. `environment` makes any S3 client on this machine use it."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def new_url(self) -> str:
        """A URL that no other test uses."""
        return f"s3://{BUCKET}/{uuid.uuid4().hex}"

    def hold(self, ending: str) -> None:
        """Holds the next PUT of a name with this ending; with the prefix `after:`, its response."""
        (self.folder / "hold").write_text(ending)

    def held(self) -> str:
        """Waits for it; returns the path of the request."""
        return (self.folder / "gate.here").read_text()

    def let(self, verdict: str) -> None:
        """`go` or `drop`."""
        (self.folder / "gate.go").write_text(verdict)


@contextmanager
def serving(folder: Path, setenv: Callable[[str, str], None]) -> Iterator[Server]:
    """Runs a server with one bucket for a block, and sets the environment for it."""
    for name in ("gate.here", "gate.go"):
        os.mkfifo(folder / name)
    command = [sys.executable, str(SERVER), str(folder)]
    with (folder / "errors").open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "errors").read_text()
        server = Server(folder, int(line))
        for name, value in server.environment.items():
            setenv(name, value)
        with own_loop():
            call("create_bucket", Bucket=BUCKET)
            yield server
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def own_loop() -> Iterator[None]:
    """fsspec's thread for asynchronous calls, which it would never end."""
    loop = fsspec.asyn.get_loop()
    yield
    if client.cache_info().currsize:
        fsspec.asyn.sync(loop, client().s3.close)
        client.cache_clear()
    loop.call_soon_threadsafe(loop.stop)
    thread = fsspec.asyn.iothread[0]
    thread.join()
    loop.close()
    fsspec.asyn.loop[0] = fsspec.asyn.iothread[0] = None


@functools.cache
def client() -> S3FileSystem:
    return S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


def call(method: str, **arguments: Any) -> dict[str, Any]:
    """One request to S3."""
    answer: dict[str, Any] = client().call_s3(method, **arguments)
    return answer


def keys(url: str) -> list[str]:
    """The objects below a URL."""
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    found = call("list_objects_v2", Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return [entry["Key"].removeprefix(prefix) for entry in found]


def uploads(url: str) -> list[str]:
    """The unfinished uploads below a URL."""
    prefix = url.removeprefix(f"s3://{BUCKET}/") + "/"
    found = call("list_multipart_uploads", Bucket=BUCKET, Prefix=prefix).get("Uploads", [])
    return [entry["Key"].removeprefix(prefix) for entry in found]
