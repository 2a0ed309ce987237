"""nginx as a reverse proxy that keeps connections, with the usual lines for WebSockets."""

import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from features import CHAT, HELLO, KEY, SAID, SAMPLE, URL, expect, feature

CONFIG = """
daemon off; pid {folder}/pid; error_log stderr warn; worker_processes 1;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  upstream service {{ server {service}; keepalive 8; }}
  map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 64m;
    location / {{
      proxy_pass http://service; proxy_http_version 1.1; proxy_buffering off; proxy_read_timeout 120s;
      proxy_set_header Host $host;
      proxy_set_header Upgrade $http_upgrade;
      proxy_set_header Connection $connection_upgrade;
    }}
  }}
}}
"""
BODY = {"model": CHAT, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}


@contextmanager
def proxy():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "nginx.conf")
        file.write_text(CONFIG.format(folder=folder, service=urlsplit(URL).netloc, port=port))
        os.chmod(folder, 0o755)
        process = subprocess.Popen(["nginx", "-c", str(file), "-p", folder])
        try:
            for _ in range(100):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def post(url, path, body, **headers):
    given = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **headers}
    request = urllib.request.Request(url + path, body, given)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return reply.read().decode()


def hello(url, **headers):
    reply = post(url, "/v1/chat/completions", json.dumps(BODY).encode(), **headers)
    return json.loads(reply)["choices"][0]["message"]["content"]


with proxy() as url:

    @feature("chat")
    def chat():
        return expect([hello(url) for _ in range(3)], [HELLO] * 3)

    @feature("chat: with offers of an upgrade among them")
    def upgrades():
        """A body that offered an upgrade must not be read as the next request of the kept connection."""
        offers = [{"Upgrade": "h2c", "Connection": "Upgrade"}, {"Upgrade": "websocket", "Connection": "Upgrade"}, {}]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(lambda at: hello(url, **offers[at % 3]), range(24)))
        return expect(set(found), {HELLO})

    @feature("stream")
    def stream():
        lines = post(url, "/v1/chat/completions", json.dumps({**BODY, "stream": True}).encode()).splitlines()
        events = [json.loads(one[6:]) for one in lines if one.startswith("data: {")]
        return expect("".join(one["choices"][0]["delta"].get("content") or "" for one in events), HELLO)

    @feature("audio")
    def audio():
        head = b'--edge\r\nContent-Disposition: form-data; name="model"\r\n\r\nspeech\r\n--edge\r\n'
        head += b'Content-Disposition: form-data; name="file"; filename="sample.flac"\r\n\r\n'
        body = head + SAMPLE.read_bytes() + b"\r\n--edge--\r\n"
        kind = {"Content-Type": "multipart/form-data; boundary=edge"}
        return expect(json.loads(post(url, "/v1/audio/transcriptions", body, **kind))["text"], SAID)
