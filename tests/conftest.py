"""What tests of several folders share: the command line in this process."""

import pytest

from autotp.cli import main


@pytest.fixture
def run_cli():
    """Runs an ``autotp`` command in this process, and returns its exit code."""

    def run(*words: object) -> int:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        return int(ended.value.code or 0)

    return run
