"""Files over HTTP: a real nginx on a socket, and before it a proxy, at a free port, that makes a network's faults."""

import contextlib
import shutil
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
MISSING = "needs nginx (Debian: nginx-light)"
CONF = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen unix:{folder}/socket;
        root {folder}/www;
        absolute_redirect off;
        location /private/ {{ return 403; }}
        location /moved/ {{ rewrite ^/moved/(.*)$ /$1 redirect; }}
        location /away/ {{ return 302 ftp://127.0.0.1/a.tar; }}
        location /rangeless/ {{ alias {folder}/www/; max_ranges 0; }}
    }}
}}
"""


class Proxy(socketserver.ThreadingTCPServer):
    """One request a connection. What it does to the next ones is set by its attributes, until `well`."""

    daemon_threads = True

    def __init__(self, backend: str) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.backend, self.url = backend, f"http://127.0.0.1:{self.server_address[1]}"
        self.well()

    def well(self) -> None:
        self.requests: list[tuple[str, str]] = []  # path, and Range or nothing
        self.faults = 0  # requests that get one of these
        self.cut: int | None = None  # bytes, after which the connection ends
        self.stall: int | None = None  # bytes, after which nothing comes
        self.answer = ""  # a status line, and no more, in place of what is there
        self.bytes_per_s = 0  # of any request; 0: as fast as can be
        self.sent = 0  # bytes, in all

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


class Connection(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # of a client that was killed
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += self.request.recv(65536)
            lines = head.decode().split("\r\n")
            ranges = [line.partition(": ")[2] for line in lines if line.lower().startswith("range:")]
            self.server.requests.append((lines[0].split()[1], ranges[0] if ranges else ""))
            faulty = self.server.faults > 0
            self.server.faults -= faulty
            if faulty and self.server.answer:
                self.request.sendall(f"HTTP/1.1 {self.server.answer}\r\n\r\n".encode())
                return
            with socket.socket(socket.AF_UNIX) as backend:
                backend.connect(self.server.backend)
                backend.sendall(head)
                self.forward(backend, faulty)

    def forward(self, backend: socket.socket, faulty: bool) -> None:
        sent = 0
        while content := backend.recv(16384):
            if faulty and self.server.cut is not None and sent + len(content) > self.server.cut:
                self.request.sendall(content[: self.server.cut - sent])
                return
            if faulty and self.server.stall is not None and sent > self.server.stall:
                time.sleep(3)
                return
            self.request.sendall(content)
            sent += len(content)
            self.server.sent += len(content)
            if self.server.bytes_per_s:
                time.sleep(len(content) / self.server.bytes_per_s)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Proxy]:
    """What is in `folder`/www."""
    assert NGINX
    (folder / "www").mkdir()
    (folder / "nginx.conf").write_text(CONF.format(folder=folder))
    command = [NGINX, "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command) as nginx, Proxy(str(folder / "socket")) as proxy:
        try:
            deadline = time.monotonic() + 10
            while not (folder / "socket").exists():
                assert nginx.poll() is None and time.monotonic() < deadline, (folder / "error.log").read_text()
                time.sleep(0.01)
            threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            yield proxy
            proxy.shutdown()
        finally:
            nginx.kill()
