-- ARGV: id, facts, 'static', or when it expires, or ''.
create(ARGV[1], ARGV[2], ARGV[3])
return 'started'
