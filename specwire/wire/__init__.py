"""Conversion between messages (specwire.messages) and protobuf: only these modules name protobuf fields.

`pack_*` makes protobuf, `unpack_*` makes dataclasses and raises InvalidArgumentError for arrays that do not fit together.
"""
