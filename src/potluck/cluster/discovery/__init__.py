"""How nodes find each other: mDNS, a multicast beacon, and addresses that somebody wrote down.

Each way is a ``Finder``; any one of them alone is enough. What they find are hints, never trust: a
hint is an address worth calling, and who answers there is known only after the TLS handshake.
"""
