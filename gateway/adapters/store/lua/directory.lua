-- directory, version 1: entitlements changed at run time, for all gateways.
--
-- KEYS[1]  entries   hash: name -> JSON
-- KEYS[2]  changed   sorted set: names of entries, by the revision of their last change
-- KEYS[3]  removed   sorted set: names that were removed, by revision; the newest are kept
-- KEYS[4]  revision  number of the last change
-- ARGV[1]  put, delete or changes
-- ARGV[2]  put: how many removed names are kept; delete: likewise; changes: revision last heard
-- ARGV[3]  put: name, entry, name, entry ...; delete: name
--
-- put and delete return the revision; changes {revision, {entry ...}, {name ...}}.

local ENTRIES, CHANGED, REMOVED, REVISION = unpack(KEYS)

if ARGV[1] == 'put' then
  local revision = redis.call('INCR', REVISION)
  for i = 3, #ARGV, 2 do
    redis.call('HSET', ENTRIES, ARGV[i], ARGV[i + 1])
    redis.call('ZADD', CHANGED, revision, ARGV[i])
    redis.call('ZREM', REMOVED, ARGV[i])
  end
  return revision
end

if ARGV[1] == 'delete' then
  local revision = redis.call('INCR', REVISION)
  if redis.call('HDEL', ENTRIES, ARGV[3]) == 1 then
    redis.call('ZREM', CHANGED, ARGV[3])
    redis.call('ZADD', REMOVED, revision, ARGV[3])
    redis.call('ZREMRANGEBYRANK', REMOVED, 0, -1 - tonumber(ARGV[2]))
  end
  return revision
end

if ARGV[1] == 'changes' then
  local since = '(' .. ARGV[2]
  local entries = {}
  for i, name in ipairs(redis.call('ZRANGEBYSCORE', CHANGED, since, '+inf')) do
    entries[i] = redis.call('HGET', ENTRIES, name)
  end
  local revision = tonumber(redis.call('GET', REVISION) or '0')
  return {revision, entries, redis.call('ZRANGEBYSCORE', REMOVED, since, '+inf')}
end

return redis.error_reply('ERR directory: bad arguments')
