"""Schedules as data: actions, builders, lowering, verification, simulation. Pure: no torch."""
