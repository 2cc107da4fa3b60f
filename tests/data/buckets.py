"""A server on this machine that answers the requests Arrow makes of S3 and of Google's JSON interface for reading.

    python3 buckets.py FOLDER     prints its port; FOLDER/<bucket>/<key> are the objects; ends with its standard input
"""
import http.server
import json
import os
import sys
import threading
import urllib.parse
from email.utils import formatdate
from xml.sax.saxutils import escape

ROOT = sys.argv[1]


def keys(bucket, prefix):
    top = os.path.join(ROOT, bucket)
    all_keys = (os.path.relpath(os.path.join(folder, f), top) for folder, _, files in os.walk(top) for f in files)
    return sorted(k for k in all_keys if k.startswith(prefix))


def grouped(names, prefix, delimiter):
    """Keys, and the folders that stand for the others."""
    if not delimiter:
        return names, []
    flat, folders = [], set()
    for n in names:
        head, found, _ = n[len(prefix):].partition(delimiter)
        folders.add(prefix + head + found) if found else flat.append(n)
    return flat, sorted(folders)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, code, body=b"", kind="application/octet-stream", headers=()):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        for name, value in headers:
            self.send_header(name, value)
        if "Content-Length" not in dict(headers):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def object(self, path):
        with open(path, "rb") as f:
            data = f.read()
        headers = [("Last-Modified", formatdate(os.path.getmtime(path), usegmt=True)), ("ETag", '"1"'),
                   ("Accept-Ranges", "bytes"), ("x-goog-generation", "1")]
        asked = self.headers.get("Range", "")
        if not asked.startswith("bytes="):
            if self.command == "HEAD":
                headers.append(("Content-Length", str(len(data))))
            return self.answer(200, data, headers=headers)
        first, _, last = asked[6:].partition("-")
        begin = int(first) if first else max(len(data) - int(last), 0)
        end = min(int(last) + 1, len(data)) if first and last else len(data)
        headers.append(("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}"))
        self.answer(206, data[begin:end], headers=headers)

    def s3_list(self, bucket, query):
        prefix = query.get("prefix", "")
        flat, folders = grouped(keys(bucket, prefix), prefix, query.get("delimiter", ""))
        rows = "".join(
            f"<Contents><Key>{escape(k)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>1</ETag>"
            f"<Size>{os.path.getsize(os.path.join(ROOT, bucket, k))}</Size></Contents>" for k in flat)
        rows += "".join(f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>" for f in folders)
        body = (f'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
                f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(flat) + len(folders)}</KeyCount>"
                f"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>")
        self.answer(200, body.encode(), "application/xml")

    def google(self, path, query):
        def about(bucket, key):
            return {"kind": "storage#object", "bucket": bucket, "name": key, "generation": "1", "metageneration": "1",
                    "size": str(os.path.getsize(os.path.join(ROOT, bucket, key))),
                    "updated": "2024-01-01T00:00:00Z", "timeCreated": "2024-01-01T00:00:00Z"}

        def missing():
            error = {"error": {"code": 404, "message": "not found", "errors": [{"reason": "notFound"}]}}
            self.answer(404, json.dumps(error).encode(), "application/json")

        parts = path.split("/", 2)  # bucket, "o", key
        bucket, key = parts[0], urllib.parse.unquote(parts[2]) if len(parts) > 2 else None
        if key is None and len(parts) > 1:
            prefix = query.get("prefix", "")
            flat, folders = grouped(keys(bucket, prefix), prefix, query.get("delimiter", ""))
            body = {"kind": "storage#objects", "items": [about(bucket, k) for k in flat], "prefixes": folders}
            return self.answer(200, json.dumps(body).encode(), "application/json")
        if key is None:
            if not os.path.isdir(os.path.join(ROOT, bucket)):
                return missing()
            return self.answer(200, json.dumps({"kind": "storage#bucket", "name": bucket}).encode(), "application/json")
        file = os.path.join(ROOT, bucket, key)
        if not os.path.isfile(file):
            return missing()
        if query.get("alt") == "media":
            return self.object(file)
        self.answer(200, json.dumps(about(bucket, key)).encode(), "application/json")

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        for start in ("/storage/v1/b/", "/download/storage/v1/b/"):
            if url.path.startswith(start):
                return self.google(url.path[len(start):], query)
        path = urllib.parse.unquote(url.path).strip("/")
        file = os.path.join(ROOT, path)
        if "/" not in path and self.command == "GET":
            return self.s3_list(path, query)
        if os.path.isfile(file) or (os.path.isdir(file) and "/" not in path):
            return self.object(file) if os.path.isfile(file) else self.answer(200)
        missing = '<?xml version="1.0"?><Error><Code>NoSuchKey</Code><Message>not found</Message></Error>'
        self.answer(404, missing.encode() if self.command == "GET" else b"", "application/xml")

    do_HEAD = do_GET


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
