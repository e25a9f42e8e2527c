"""Benchmarks of a real relay, each beside its own limit on the same machine: `python -m benches --help`.

daemon       a `relayd serve` process on its own folder, and what it costs in CPU and memory
load         packets signed and frames masked before any clock starts
peer         a WebSocket client so lean that it does not limit the measurement
bare         the limits: signature checks, the log, socket writes and echo, each alone
authors      authors with and without key chains, packets with and without a proven origin
attacks      the attacks, by name
crowds       idle and hostile connections, in their own processes
honest       publishers with a timetable and a live reader, beside an attack
besieged     what each attack costs the attacker, the relay and the honest clients
publish, fanout, latency, catchup, idle, checks, identities, opening,
hostile      one measurement each
measures     values, targets and the table
"""
