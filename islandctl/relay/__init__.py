"""The relay: stores packets and orders commits. It does no arithmetic."""
