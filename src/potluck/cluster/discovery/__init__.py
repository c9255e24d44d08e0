"""How nodes find each other: by mDNS, by a multicast beacon, or by written addresses.

Each way is a ``Finder``, and any of them alone is enough. A finder gives hints: a hint is an
address worth calling, and proves nothing. Which node answers there is known only after the TLS
handshake.
"""
