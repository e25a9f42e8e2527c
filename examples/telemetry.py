"""Readings that soon become stale, and alarms that must not be lost, on one channel.

    python examples/telemetry.py ws://127.0.0.1:7447/strata dashboard
    python examples/telemetry.py ws://127.0.0.1:7447/strata sensor --readings 50

Readings are ephemeral: they are sent once to the dashboards that listen now, and neither repeated nor stored.
Every tenth reading is above the limit and is also sent as an ordinary message, which even a dashboard that
joins later receives.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json

import strata
from strata.channels.reliable import ReliableChannel, ReliableMessageDelivered

LIMIT = 80.0


async def sensor(room: ReliableChannel, readings: int) -> None:
    """Send readings ten times a second, and return when every alarm has been received."""
    delivered = room.events(ReliableMessageDelivered.name)
    alarms = 0
    for number in range(readings):
        celsius = 95.0 if number % 10 == 9 else 20.0 + number % 10
        reading = json.dumps({"number": number, "celsius": celsius}).encode()
        await room.send_ephemeral(reading)
        if celsius > LIMIT:
            alarms += 1
            await room.send(reading)
        await asyncio.sleep(0.1)
    for _ in range(alarms):
        await anext(delivered)
    print(f"{readings} readings sent, {alarms} alarms delivered")


async def dashboard(room: ReliableChannel) -> None:
    """Print readings and alarms."""
    async for message in room:
        kind = "reading" if message.ephemeral else "ALARM"
        print(kind, json.loads(message.payload)["celsius"], flush=True)


async def main(url: str, role: str, readings: int, topic: str) -> None:
    """Open the channel, and be the sensor or the dashboard."""
    async with (
        strata.connect(url, identity=strata.Identity.generate()) as relay,
        relay.channel("boiler", topic=topic, sender_id=role) as room,
    ):
        await (sensor(room, readings) if role == "sensor" else dashboard(room))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url", help="a relay")
    parser.add_argument("role", choices=("sensor", "dashboard"))
    parser.add_argument("--readings", type=int, default=50)
    parser.add_argument("--topic", default="/telemetry/1/boiler/json")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(arguments.url, arguments.role, arguments.readings, arguments.topic))
