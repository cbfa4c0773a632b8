"""What lies between the network and the routes: connections, deadlines, signals, the drain, keys from files.

Nothing here knows what a request asks for.
"""
