"""The least that a relay on aiohttp can do: parse the body, send it to both workers with one field more, copy the stream."""
import asyncio
import json
import random
import sys

from aiohttp import ClientSession, TCPConnector, web

PREFILL, DECODE = "http://127.0.0.1:9101", "http://127.0.0.1:9102"


async def session(app):
    app["client"] = ClientSession(connector=TCPConnector(limit=0))
    yield
    await app["client"].close()


async def drain(client, url, data):
    async with client.post(url, data=data, headers={"Content-Type": "application/json"}) as answer:
        await answer.read()


async def relay(request):
    body = await request.json()
    body["bootstrap_host"], body["bootstrap_port"], body["bootstrap_room"] = "127.0.0.1", 8998, random.getrandbits(62)
    data = json.dumps(body)
    client = request.app["client"]
    first = asyncio.create_task(drain(client, PREFILL + request.path, data))
    async with client.post(DECODE + request.path, data=data, headers={"Content-Type": "application/json"}) as answer:
        out = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
        await out.prepare(request)
        async for piece in answer.content.iter_any():
            await out.write(piece)
    await first
    await out.write_eof()
    return out


app = web.Application(client_max_size=1 << 26)
app.cleanup_ctx.append(session)
for path in "/v1/completions", "/v1/chat/completions", "/generate":
    app.router.add_post(path, relay)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
