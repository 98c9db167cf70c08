"""A collector that reads spans with OpenTelemetry's own protobuf types for Python, and prints each request as JSON."""

import http.server
import json
import sys

from google.protobuf.json_format import MessageToDict
from google.protobuf.unknown_fields import UnknownFieldSet
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


def unknown_fields(message):
    count = len(UnknownFieldSet(message))
    for field, value in message.ListFields():
        if field.message_type is not None:
            parts = value if field.is_repeated else [value]
            count += sum(unknown_fields(part) for part in parts)
    return count


class Collector(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        request = ExportTraceServiceRequest.FromString(body)
        found = {
            "path": self.path,
            "type": self.headers["content-type"],
            "unknown": unknown_fields(request),
            "request": MessageToDict(request),
        }
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
        print(json.dumps(found), flush=True)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
print(server.server_address[1], flush=True)
server.serve_forever()
sys.exit(0)
