"""The parts of `tests/lab/lab`: systemd hosts on a bridge, made for tests and gone without a trace."""
