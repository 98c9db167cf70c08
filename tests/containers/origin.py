"""An HTTPS server that answers each GET with its path, and prints the credential that it has seen."""

import json
import ssl
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        print(f"{self.path} authorization={self.headers.get('authorization')}", flush=True)
        body = json.dumps({"path": self.path}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("0.0.0.0", 443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("/certificates/cert.pem", "/certificates/key.pem")
server.socket = context.wrap_socket(server.socket, server_side=True)
print("listens", flush=True)
server.serve_forever()
