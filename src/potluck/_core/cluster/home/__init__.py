"""The files of agents, below ``<home>``: secret files, their state, the port they listen on."""
