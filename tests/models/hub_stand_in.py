"""A Hub on this machine: as much of its HTTP interface as creating, uploading to and downloading a repository take."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


class Hub:
    """Keeps repositories in memory: name -> path -> content. Only one token may write."""

    TOKEN = "hf_stand_in"

    def __init__(self):
        self.files, self.commits = {}, []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self, status, value=None, headers=None, body=None):
                body = json.dumps(value).encode() if body is None else body
                self.send_response(status)
                for name, content in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(name, content)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def read(self):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def do_POST(self):
                path, body = urlparse(self.path).path, self.read()
                if self.headers.get("Authorization") != f"Bearer {hub.TOKEN}":
                    return self.answer(401, {"error": "Invalid username or password."})
                if path == "/api/repos/create":
                    asked = json.loads(body)
                    name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
                    hub.files.setdefault(name, {})
                    return self.answer(200, {"url": f"{hub.address}/{name}", "name": name})
                if path == "/api/validate-yaml":
                    return self.answer(200, {"errors": [], "warnings": []})
                name, action = re.fullmatch(r"/api/models/(\w+/[\w-]+)/(\w+)/\w+", path).groups()
                if action == "preupload":
                    asked = json.loads(body)["files"]
                    found = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
                    return self.answer(200, {"files": found})
                lines = [json.loads(line) for line in body.splitlines()]
                for line in lines:
                    if line["key"] == "file":
                        hub.files[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                hub.commits.append(lines[0]["value"]["summary"])
                commit = {"commitUrl": f"{hub.address}/{name}/commit/{'a' * 40}", "commitOid": "a" * 40}
                return self.answer(200, {"success": True, "pullRequestUrl": None, **commit})

            def do_GET(self):
                path = unquote(urlparse(self.path).path)
                found = re.fullmatch(r"/api/models/(\w+/[\w-]+)(?:/revision/(\w+))?", path)
                missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
                if found is not None:
                    name = found[1]
                    if name not in hub.files:
                        return self.answer(404, {"error": "Repository not found"}, missing)
                    siblings = [{"rfilename": file} for file in hub.files[name]]
                    return self.answer(200, {"id": name, "sha": "a" * 40, "siblings": siblings})
                listed = re.fullmatch(r"/api/models/(\w+/[\w-]+)/tree/\w+", path)
                if listed is not None:
                    files = hub.files[listed[1]].items()
                    entries = [{"type": "file", "path": p, "size": len(c), "oid": "b" * 40} for p, c in files]
                    return self.answer(200, entries)
                name, file = re.fullmatch(r"/(\w+/[\w-]+)/resolve/\w+/(.*)", path).groups()
                if file not in hub.files.get(name, {}):
                    return self.answer(404, {}, {"X-Error-Code": "EntryNotFound"})
                body = hub.files[name][file]
                tags = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": "a" * 40}
                return self.answer(200, headers=tags, body=body)

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *_):
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()
