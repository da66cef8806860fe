"""A webhook that tests send messages to."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "5ec2e7webhook"
"""A part of its address."""


class Endpoint:
    """Takes Apprise's JSON posts."""

    def __init__(self) -> None:
        self.bodies: list[str] = []
        self.refuse = 0
        """Posts that are answered by 503."""
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code = 503 if endpoint.refuse > 0 else 200
                endpoint.refuse -= 1
                if code == 200:
                    endpoint.bodies.append(said["message"])
                self.send_response(code)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"json://127.0.0.1:{self.server.server_port}/{SECRET}"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
