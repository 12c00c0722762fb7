"""Errors that are for the person who runs the pipeline: one line that says what, where and what to do."""


class UserError(Exception):
    """Something the user can mend. A stage prints it in one line, without a traceback, and exits with status 1."""


class ParameterError(UserError):
    """A parameter that is unknown, missing, of the wrong type or outside its range."""


class DataError(UserError):
    """Data that cannot be read or used."""


class BaseModelError(UserError):
    """A base model, adapter or head that cannot be found, loaded or trusted."""


class TrainingError(UserError):
    """Training cannot go on: nothing to train on, or numbers that are no longer finite."""


class StorageError(UserError):
    """A folder that cannot be written to, or a disk without room."""


class PeerLostError(UserError):
    """Another process of the same stage has ended; why is for that one to say."""


class NoRoomError(UserError):
    """A stage that cannot fit into memory."""
