"""An S3 server on a free port of 127.0.0.1: `python s3_server.py FOLDER`; prints the port.

One PUT whose name ends with the content of the file FOLDER/hold waits at the gate in FOLDER. The
text written to the gate decides: `drop` refuses the request, anything else lets it continue. With
the prefix `after:`, the request is performed first, and only the response waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

folder = Path(sys.argv[1])
serve = DomainDispatcherApplication(create_backend_app)


class Quiet(WSGIRequestHandler):
    def log(self, *_: Any) -> None:
        pass


def gated(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    hold = folder / "hold"
    if environ["REQUEST_METHOD"] == "PUT" and hold.exists():
        after, _, ending = hold.read_text().rpartition(":")
        if ending and environ["PATH_INFO"].endswith(ending):
            hold.unlink()
            answer = list(serve(environ, start_response)) if after else []
            (folder / "gate.here").write_text(environ["PATH_INFO"])
            verdict = (folder / "gate.go").read_bytes()
            if after:
                return answer
            if verdict == b"drop":
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                start_response("403 Forbidden", [("Content-Length", "0")])
                return [b""]
    return serve(environ, start_response)


server = make_server("127.0.0.1", 0, gated, threaded=True, request_handler=Quiet)
print(server.server_port, flush=True)
server.serve_forever()
