"""The errors that are the user's to mend: `main` prints them as one line, without a traceback."""


class ConfigError(ValueError):
    """A setting that can't work: the message names the key, its value, the reason and the way out. Exit code 78."""


class DataError(ValueError):
    """Data that is missing, damaged or not what it was: the message names the file and the way out. Exit code 71."""


def exit_code(error: BaseException) -> int:
    return 78 if isinstance(error, ConfigError) else 71 if isinstance(error, DataError) else 1
