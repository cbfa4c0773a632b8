"""The engine of bench/edge.py: answers at once, as fast as one Python process can. Run: python _edge_engine.py PORT…"""

from __future__ import annotations

import asyncio
import sys

from _request_reader import RequestReader

EVENT = b'data: {"id":"x","object":"text_completion","choices":[{"index":0,"text":" word"}]}\n\n'
EVENTS = 16
HELD_STREAMS = 1000
BODY = b'{"id":"x","object":"text_completion","choices":[{"index":0,"text":" word","finish_reason":"length"}]}'
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Engine(RequestReader):
    """A stream is 16 events in packets of their own."""

    holding = 0
    released: asyncio.Event

    def take(self, head: bytes, body: bytes) -> None:  # noqa: ARG002
        body = body.replace(b" ", b"")  # where a router writes it anew, blanks and the order of fields may change
        if b'"hold":true' in body:
            asyncio.get_running_loop().create_task(self._hold())
        elif b'"stream":true' in body:
            asyncio.get_running_loop().create_task(self._stream())
        else:
            self.transport.write(WHOLE)

    async def _hold(self) -> None:
        """Begin a stream, and end it when a thousand of them have begun, or after a minute."""
        self.transport.write(HEAD + b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
        Engine.holding += 1
        if Engine.holding >= HELD_STREAMS:
            Engine.released.set()
        try:
            await asyncio.wait_for(Engine.released.wait(), 60)
        except TimeoutError:
            self.transport.abort()
            return
        self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    async def _stream(self) -> None:
        self.transport.write(HEAD)
        for _ in range(EVENTS):
            self.transport.write(b"%x\r\n%b\r\n" % (len(EVENT), EVENT))
            await asyncio.sleep(0)
        self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def main(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    Engine.released = asyncio.Event()
    servers = [await loop.create_server(Engine, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    try:
        import uvloop

        uvloop.install()
    except ImportError:
        pass
    asyncio.run(main([int(word) for word in sys.argv[1:]]))
