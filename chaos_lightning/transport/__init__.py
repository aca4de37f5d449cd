"""Links between members: frames, integrity, authenticated dialling and the one epoll loop that serves them."""
