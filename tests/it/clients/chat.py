"""What gRPC does, against chat_server.py: every kind of call, on one channel. Nothing here names a proxy or a CA."""

import os
import queue
import sys

import grpc

channel = grpc.secure_channel(sys.argv[1], grpc.ssl_channel_credentials())
TIMEOUT = 20


def method(kind, name):
    call = kind("/chat.Chat/" + name)
    return lambda message, timeout=TIMEOUT, **more: call(message, timeout=timeout, **more)


say, ended = (method(channel.unary_unary, name) for name in ("Say", "Ended"))
count, fail, wait = (method(channel.unary_stream, name) for name in ("Count", "Fail", "Wait"))
talk = method(channel.stream_stream, "Talk")


def error(ask):
    try:
        ask()
    except grpc.RpcError as error:
        return error
    sys.exit("that came through")


assert say(b"hello") == b"hello"
print("unary")

# The next message leaves when the echo of the last is here: who keeps one back stops both.
outgoing = queue.SimpleQueue()
echoes = talk(iter(outgoing.get, None))
for number in range(50):
    outgoing.put(b"%d" % number)
    assert next(echoes) == b"%d" % number
outgoing.put(None)
assert next(echoes, None) is None and echoes.code() == grpc.StatusCode.OK
print("50 rounds")

assert list(count(b"1000")) == [b"%d" % number for number in range(1000)]
print("1000 messages")

# Without a message the status stands in the head of the answer, with one in its trailers.
for messages in (0, 1):
    answer = fail(b"%d" % messages)
    assert [next(answer) for _ in range(messages)] == [b"first"] * messages
    failed = error(lambda: next(answer))
    assert (failed.code(), failed.details()) == (grpc.StatusCode.FAILED_PRECONDITION, "100 % “no”\n"), failed
    trailers = dict(failed.trailing_metadata())
    assert (trailers["x-why"], trailers["x-why-bin"]) == ("because", bytes(range(256))), trailers
assert error(lambda: method(channel.unary_unary, "None")(b"")).code() == grpc.StatusCode.UNIMPLEMENTED
print("status and trailers")

message = os.urandom(2 << 20)
assert say(message) == message
message = bytes(2 << 20)
if "KEY" not in os.environ:
    # Where there is a key nothing may be compressed.
    assert say(message, compression=grpc.Compression.Gzip, metadata=[("x-compress", "yes")]) == message
print("2 MiB")

call = wait(b"deadline", timeout=2)
# gRPC rounds up what it sends.
assert 0 < float(dict(call.initial_metadata())["x-left"]) < 3, call.initial_metadata()
assert error(lambda: next(call)).code() == grpc.StatusCode.DEADLINE_EXCEEDED, call
assert ended(b"deadline") == b"yes"
call = wait(b"cancel")
assert 3 < float(dict(call.initial_metadata())["x-left"]), call.initial_metadata()
call.cancel()
assert ended(b"cancel") == b"yes"
print("deadline and cancellation")

if key := os.environ.get("KEY"):
    call = channel.unary_unary("/chat.Chat/Say")
    echo, call = call.with_call(b"", metadata=[("authorization", "Bearer " + key)], timeout=TIMEOUT)
    compressed = error(lambda: say(b"", metadata=[("x-compress", "yes")]))
    assert compressed.details() == "Received http2 header with status: 502", compressed
    print(echo.decode(), dict(call.trailing_metadata())["x-got"], sep="\n")
