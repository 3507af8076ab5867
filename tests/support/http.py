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

import pytest

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="no nginx (Debian: nginx-light)")
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


class Nginx:
    """What is in `folder`/www, at a socket."""

    def __init__(self, folder: Path) -> None:
        assert NGINX
        self.folder, self.socket = folder, folder / "socket"
        (folder / "www").mkdir()
        (folder / "nginx.conf").write_text(CONF.format(folder=folder))
        self.command = [NGINX, "-e", str(folder / "error.log"), "-p", str(folder), "-c", str(folder / "nginx.conf")]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command)
        deadline = time.monotonic() + 10
        while not self.socket.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, (self.folder / "error.log").read_text()
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.unlink(missing_ok=True)


class Proxy(socketserver.ThreadingTCPServer):
    """One request a connection. What it does to the next ones is set by its attributes, until `well`."""

    daemon_threads = True

    def __init__(self, nginx: Nginx) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.nginx, self.url = nginx, f"http://127.0.0.1:{self.server_address[1]}"
        self.counting = threading.Lock()
        self.open = 0  # requests at this moment
        self.well()

    def well(self) -> None:
        self.requests: list[tuple[str, str]] = []  # path, and Range or nothing
        self.faults = 0  # requests that get one of these
        self.cut: int | None = None  # bytes, after which the connection ends
        self.stall: int | None = None  # bytes, after which nothing comes
        self.answer = ""  # a status line, and no more, in place of what is there
        self.bytes_per_s = 0  # of any request; 0: as fast as can be
        self.sent = 0  # bytes, in all
        self.most_open = 0  # requests at the same time

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]


class Connection(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        self.count(1)
        with contextlib.suppress(OSError):  # of a client that was killed, of nginx that was
            self.answer()
        self.count(-1)

    def count(self, more: int) -> None:
        with self.server.counting:
            self.server.open += more
            self.server.most_open = max(self.server.most_open, self.server.open)

    def answer(self) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if not (content := self.request.recv(65536)):
                return
            head += content
        lines = head.decode().split("\r\n")
        ranges = [line.partition(": ")[2] for line in lines if line.lower().startswith("range:")]
        self.server.requests.append((lines[0].split()[1], ranges[0] if ranges else ""))
        faulty = self.server.faults > 0
        self.server.faults -= faulty
        if faulty and self.server.answer:
            self.request.sendall(f"HTTP/1.1 {self.server.answer}\r\n\r\n".encode())
            return
        with socket.socket(socket.AF_UNIX) as backend:
            backend.connect(str(self.server.nginx.socket))
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
            if rate := self.server.bytes_per_s:
                until = time.monotonic() + len(content) / rate
                while self.server.bytes_per_s == rate and time.monotonic() < until:
                    time.sleep(0.02)
            self.request.sendall(content)
            sent += len(content)
            self.server.sent += len(content)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Proxy]:
    """What is in `folder`/www."""
    nginx = Nginx(folder)
    try:
        with Proxy(nginx) as proxy:
            threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            yield proxy
            proxy.shutdown()
    finally:
        nginx.kill()
