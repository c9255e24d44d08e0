"""Checkpoints: the state of a training as bytes and as files, without pickle."""

from potluck.checkpoint.state import State, decode, encode, fingerprint
from potluck.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore", "State", "decode", "encode", "fingerprint"]
