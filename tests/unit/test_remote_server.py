"""`Remote`'s connections to a server, without one of midstream's."""

from __future__ import annotations

import http.server
import os
import threading

from midstream.remote.model import ServerConnection


class Ports(http.server.BaseHTTPRequestHandler):
    """Answers with the port of the client's end of the connection."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        answer = str(self.client_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *given: object) -> None:
        pass


def test_a_forked_process_has_connections_of_its_own() -> None:
    """On its parent's, each could read the other's answers."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ports) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        server = ServerConnection(f"http://127.0.0.1:{there.server_port}", None, None)
        own = server.ask("GET", "x").text
        assert server.ask("GET", "x").text == own  # the connection is kept
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writing, server.ask("GET", "x").content)
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(reading, 99).decode() != own
        server.close()
        there.shutdown()
