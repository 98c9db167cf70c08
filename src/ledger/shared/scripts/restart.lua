-- ARGV: id, facts, and 'static', the expiry time, or ''.
create(ARGV[1], ARGV[2], ARGV[3])
return 'started'
