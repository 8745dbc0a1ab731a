"""What every backend takes from a box besides system calls (`seccomp.py`): capabilities, and sight of the kernel."""

from __future__ import annotations

ROOT_MAY = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]
"""Capabilities of a box with root: what packages and tests need for files and users, and to end what became another.

Any other box has none. None of these reaches PID 1's memory, or the network's rules.
"""
HIDDEN = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/kpagecgroup",
    "/proc/kpagecount",
    "/proc/kpageflags",
    "/proc/latency_stats",
    "/proc/pagetypeinfo",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/slabinfo",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/vmallocinfo",
    "/sys/firmware",
)
"""Of the machine, not of the box; readable to the kernel's user 0, who a root box is, and any box that root starts."""
READ_ONLY = (
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
    "/proc/1/mem",
    "/proc/1/task/1/mem",
)
"""Of a /proc that may be written: what an engine protects anyway, and what a shell that is PID 1 cannot protect."""
