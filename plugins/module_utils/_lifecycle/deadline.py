# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""One deadline for a whole run, on the monotonic clock."""

from __future__ import annotations

import time


class Deadline:
    """Seconds from now. ``rest`` sleeps between two looks and says whether there may be another one."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._start

    @property
    def says(self) -> str:
        """How much of it is over, for people who wait."""
        return f"{self.elapsed:.0f} of {self.seconds:.0f} s"

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.elapsed)

    def rest(self, interval: float = 0.2) -> bool:
        """Sleep for one interval, or for what is left; False when the deadline has come."""
        left = self.left
        if left <= 0:
            return False
        time.sleep(min(interval, left))
        return True

    def sooner(self, seconds: float) -> Deadline:
        """A deadline inside this one, never later than it."""
        return Deadline(min(seconds, self.left))
