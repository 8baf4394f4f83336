"""What client machines can do: described, loaded from files, generated, measured."""

from __future__ import annotations

from raafl.devices.profiles import Device, Profile, TaskTime, assign, load_devices, two_classes

__all__ = ["Device", "Profile", "TaskTime", "assign", "load_devices", "two_classes"]
