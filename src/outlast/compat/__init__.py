"""Stand-ins for the packages that `outlast` follows, under the names that their users import."""
