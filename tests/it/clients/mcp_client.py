"""The official SDK of the Model Context Protocol as a client of exeat-tools. Prints what it saw, as JSON."""

import json
import os
import sys
import time

import anyio
import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

WHERE, MODE, BASE = sys.argv[1:]


def transport():
    """A URL, with the token in EXEAT_MCP_TOKEN; else the program to start."""
    if WHERE.startswith("http://"):
        token = {"Authorization": "Bearer " + os.environ["EXEAT_MCP_TOKEN"]}
        return streamable_http_client(WHERE, http_client=httpx2.AsyncClient(headers=token, timeout=20))
    return StdioServerParameters(command=WHERE, args=["mcp"], env={"EXEAT_PROXY": os.environ["EXEAT_PROXY"]})


def told(result):
    assert len(result.content) == 1 and result.content[0].type == "text", result
    return {"error": result.is_error, "text": result.content[0].text, "meta": (result.meta or {}).get("exeat/result")}


async def main():
    saw = {}
    async with Client(transport(), mode=MODE, read_timeout_seconds=20) as client:
        saw["version"] = client.protocol_version
        tools = (await client.list_tools()).tools
        saw["tools"] = {tool.name: tool.annotations.read_only_hint for tool in tools}
        saw["required"] = {tool.name: tool.input_schema["required"] for tool in tools}
        saw["get"] = told(await client.call_tool("http_get", {"url": BASE + "/"}))
        given = {"method": "POST", "url": BASE + "/echo", "credential": "KEY", "body": {"a": "ü"}}
        saw["api"] = told(await client.call_tool("api_call", given))
        saw["refused"] = told(await client.call_tool("http_get", {"url": "https://evil.test/"}))
        saw["unknown"] = told(await client.call_tool("format_disk", {}))
        heard = []

        async def progress(done, total, message):
            heard.append([done, message])
            if len(heard) == 2:
                slow.cancel()

        began = time.monotonic()
        with anyio.CancelScope() as slow:
            await client.call_tool("http_get", {"url": BASE + "/stall"}, progress_callback=progress)
        saw["slow"] = {"cancelled": slow.cancelled_caught, "heard": heard, "took": time.monotonic() - began}
        # Many at once, and the connection is as good as before.
        texts = []

        async def one(n):
            result = await client.call_tool("http_get", {"url": BASE + "/", "query_params": {"n": n}})
            texts.append(result.content[0].text)

        async with anyio.create_task_group() as group:
            for n in range(20):
                group.start_soon(one, n)
        saw["many"] = texts
    print(json.dumps(saw))


anyio.run(main)
