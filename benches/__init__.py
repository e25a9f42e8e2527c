"""Benchmarks of a real relay, each beside its own limit on the same machine: `python -m benches --help`.

daemon       a `relayd serve` process on a folder of its own, and what it costs in CPU and memory
load         packets signed and frames masked before any clock starts
peer         a WebSocket client lean enough not to be what is measured
bare         the limits: signature checks, the log, socket writes and echo, each alone
authors      who signs: with and without key chains, with and without a proven origin
attacks      what an enemy does, by name
crowds       idle and hostile connections, in processes of their own
honest       publishers with a timetable and a live reader, beside an attack
besieged     what each attack costs the attacker, the relay and the honest
publish, fanout, latency, catchup, idle, checks, identities, opening,
hostile      one measurement each
measures     values, targets and the table
"""
