"""Describe client machines: profiles written by hand, bundled by name, drawn, loaded from files, measured."""

from __future__ import annotations

from raafl.devices.profiles import Device, Profile, TaskTime, assign

__all__ = ["Device", "Profile", "TaskTime", "assign"]
