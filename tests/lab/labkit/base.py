"""The base tree of every host: a Debian system made once, under a name that is the hash of all that defines it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from labkit import files
from labkit.plan import LabError
from labkit.system import Progress, call, guarded

SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
INSTALLED = "packages-base.txt"
OFFERED = "packages-offered.txt"

# Of no use in a host that lives for a test and has no network, and each costs boot time.
MASKED = [
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "systemd-networkd-wait-online.service",
    "systemd-timesyncd.service",
]
SSHD = """\
# Keys only, and no look-up of names: there is nobody to ask.
PasswordAuthentication no
PermitRootLogin prohibit-password
UseDNS no
MaxStartups 100
MaxSessions 100
"""
# Host-unique: made for each host when it is made.
UNIQUE = ["etc/hostname", "etc/hosts", "etc/machine-id", "var/lib/dbus/machine-id", "etc/resolv.conf"]


def mirror() -> str:
    return os.environ.get("VLLM_LAB_MIRROR", MIRROR)


def key() -> str:
    """The base tree's name; changes with this file, the lists of packages, and the mirror."""
    parts = [Path(__file__).read_bytes(), mirror()]
    parts += [" ".join(files.listed(files.HERE / name)) for name in (INSTALLED, OFFERED)]
    return files.digest(parts)


def path(base: str) -> Path:
    return files.cache() / "bases" / base


def make(progress: Progress) -> str:
    """Makes the base tree where there is none; returns its name."""
    name = key()
    with files.made_whole(path(name)) as root:
        if root is None:
            return name
        progress(f"base tree {name}: debootstrap of {SUITE} (once, about a minute)")
        packages = files.cache() / "packages"
        packages.mkdir(exist_ok=True)
        # In memory, since package managers sync each file; in this process's own mounts, so it ends with us.
        scratch = root / "scratch"
        scratch.mkdir()
        call(["mount", "-t", "tmpfs", "-o", "size=2g,mode=755", "lab", str(scratch)])
        tree = scratch / "tree"
        included = ",".join(files.listed(files.HERE / INSTALLED))
        options = ["--variant=minbase", f"--include={included}", f"--cache-dir={packages}"]
        guarded(
            ["debootstrap", *options, SUITE, str(tree), mirror()],
            "debootstrap failed; its log is above: is the mirror reached? (VLLM_LAB_MIRROR names another)",
        )
        progress("base tree: packages that hosts may install")
        offer(tree)
        settle(tree)
        call(["cp", "-a", str(tree), str(root / "tree")])
        call(["umount", str(scratch)])
        scratch.rmdir()
    progress(f"base tree {name}: made")
    return name


def offer(tree: Path) -> None:
    """Puts packages where `apt install` finds them without a network, and makes apt's lists."""
    wanted = files.listed(files.HERE / OFFERED)
    apt = ["chroot", str(tree), "apt-get", "-q", "-y", "--no-install-recommends"]
    guarded([*apt, "clean"], "apt-get clean in the base tree failed")
    guarded([*apt, "update"], "apt-get update in the base tree failed")
    guarded([*apt, "--download-only", "install", *wanted], "the download of packages for the hosts failed")
    shop = tree / "srv" / "apt"
    shop.mkdir()
    entries = []
    for package in sorted((tree / "var/cache/apt/archives").glob("*.deb")):
        package = package.rename(shop / package.name.replace("%3a", "_"))
        control = call(["dpkg-deb", "--field", str(package)]).rstrip("\n")
        checksum = call(["sha256sum", str(package)]).split()[0]
        entries.append(f"{control}\nFilename: ./{package.name}\nSize: {package.stat().st_size}\nSHA256: {checksum}\n")
    (shop / "Packages").write_text("\n".join(entries))
    (tree / "etc/apt/sources.list").write_text("deb [trusted=yes] file:/srv/apt ./\n")
    shutil.rmtree(tree / "var/lib/apt/lists")
    guarded([*apt, "update"], "apt-get update from the packages just put into the base tree failed")
    guarded([*apt, "--simulate", "install", *wanted], "a package offered to the hosts lacks a dependency")


def settle(tree: Path) -> None:
    """Configures what all hosts share, and takes out what no two hosts may share."""
    (tree / "etc/ssh/sshd_config.d/lab.conf").write_text(SSHD)
    (tree / "etc/default/locale").write_text("LANG=C.UTF-8\n")
    units = tree / "etc/systemd/system"
    for unit in MASKED:
        link = units / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    call(["systemctl", f"--root={tree}", "enable", "systemd-networkd.service", "ssh.service"])
    for secret in (tree / "etc/ssh").glob("ssh_host_*"):
        secret.unlink()
    for unique in UNIQUE:
        (tree / unique).unlink(missing_ok=True)
    for left in ("var/log/apt", "var/cache/apt/archives"):
        for file in (tree / left).glob("*"):
            if file.is_file():
                file.unlink()


def layer_path(name: str) -> Path:
    if not name or name.startswith(".") or "/" in name or set(name) & set(":,\\ "):
        raise LabError(f"layer {name!r}: give a name without slash, colon, comma, backslash, space or leading dot")
    return files.cache() / "layers" / name


def lower(base: str, layers: list[str]) -> str:
    """The lower directories of a host, topmost first, as overlayfs wants them."""
    return ":".join(str(directory / "tree") for directory in [*map(layer_path, layers), path(base)])


def require_tools(*tools: str) -> None:
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        raise LabError(f"{', '.join(missing)} not found on this machine; `make deps` installs what the lab needs")


def require_root() -> None:
    if os.geteuid() != 0:
        raise LabError("not root, and the lab boots systems and makes a bridge; run it with sudo")
