"""Privileges that every backend removes in addition to system calls (`seccomp.py`): capabilities and kernel files."""

from __future__ import annotations

ROOT_MAY = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]
"""Capabilities of a sandbox with root: packages and tests need them for files, users and other users' processes.

Any other sandbox has none. None of them gives access to PID 1's memory or to the network's rules.
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
"""Files of the machine that are hidden from sandboxes, because a sandbox with root, or one that root starts, could read
them."""
READ_ONLY = (
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
    "/proc/1/mem",
    "/proc/1/task/1/mem",
)
"""Read-only parts of a writable /proc: those that an engine protects anyway, and that a shell as PID 1 cannot
protect."""
