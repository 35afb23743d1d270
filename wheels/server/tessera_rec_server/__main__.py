"""``python -m tessera_rec_server`` is tessera-server."""

from tessera_rec_server import main

main()
