"""Deciding which role uses which device at which time, and carrying the decision out in a running step.

`coordinator.py` is the actor that puts roles to sleep, wakes them up and gives requests to engines, and
`coordinator_client.py` is how controllers call it. `policy.py` decides how many cells rollout and GenRM get; the
simulator calls the same function. `rebalancer.py` turns what the pools measured into the policy's input.
`engine_pool.py` counts the requests of each engine, and `device_ledger.py` refuses states in which two roles would
share a device. `state_changes.py` tells units to change their state; where hosts have agents, the units of a host
together. `engine_time.py` and `judge_idle.py` measure load, and `usage_report.py` collects metrics and decisions for
the controllers.

May import: common, protocol.
"""
