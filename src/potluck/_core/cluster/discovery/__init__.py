"""Discovery: nodes find each other by mDNS, by a multicast beacon, or by configured addresses.

Each of the three is a ``Finder``, and each alone is enough. A finder gives hints: a hint is an
address at which a node may listen, and is not trusted. The TLS handshake proves the identity of the
node that answers.
"""
