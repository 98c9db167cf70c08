"""A gRPC server with TLS on a free port, which it says. It ends with its standard input."""

import concurrent.futures
import sys
import threading

import grpc

ENDED = {"deadline": threading.Event(), "cancel": threading.Event()}


def say(message, context):
    """What came, also of keys. Compressed for those who ask for that."""
    asked = dict(context.invocation_metadata())
    if "x-compress" in asked:
        context.set_compression(grpc.Compression.Gzip)
    if "authorization" in asked:
        with open("key", "w") as file:
            file.write(asked["authorization"])
        context.set_trailing_metadata([("x-got", asked["authorization"])])
        return asked["authorization"].encode()
    return message


def talk(messages, context):
    yield from messages


def count(message, context):
    for number in range(int(message)):
        yield b"%d" % number


def fail(message, context):
    yield from [b"first"] * int(message)
    context.set_trailing_metadata((("x-why", "because"), ("x-why-bin", bytes(range(256)))))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "100 % “no”\n")


def wait(message, context):
    """Says when it starts how long it has, and goes on until the client does not want it any more."""
    ended = ENDED[message.decode()]
    ended.clear()
    context.add_callback(ended.set)
    context.send_initial_metadata([("x-left", str(context.time_remaining()))])
    ended.wait(20)
    yield b""


def ended(message, context):
    return b"yes" if ENDED[message.decode()].wait(15) else b"no"


key, certificate = (open(path, "rb").read() for path in sys.argv[1:])
server = grpc.server(concurrent.futures.ThreadPoolExecutor(8))
unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
methods = {
    "Say": unary(say),
    "Talk": grpc.stream_stream_rpc_method_handler(talk),
    "Count": stream(count),
    "Fail": stream(fail),
    "Wait": stream(wait),
    "Ended": unary(ended),
}
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("chat.Chat", methods)])
print(server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)])), flush=True)
server.start()
sys.stdin.read()
server.stop(0).wait()
