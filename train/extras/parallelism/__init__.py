from train.extras import Extra


class Room(Extra): ...
