"""Privileges that every backend removes besides system calls (`seccomp.py`): capabilities and files of the kernel."""

from __future__ import annotations

ROOT_MAY = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]
"""Capabilities of a sandbox with root: packages and tests need them for files, users and other users' processes.

Any other sandbox has none. None of these reaches PID 1's memory, or the network's rules.
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
"""Files of the machine, hidden from the sandbox: a sandbox with root, or one that root starts, could read them."""
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
