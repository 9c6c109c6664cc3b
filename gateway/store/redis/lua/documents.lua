-- documents, version 1: documents that change by compare-and-set, shared by all gateways.
--
-- KEYS[1]  documents  hash: id -> VERSION blank VALUE
-- KEYS[2]  places     sorted set: ids of one tenant, by place
-- KEYS[3]  open       sorted set: open ids of all tenants, by place
-- KEYS[4]  opened     set: open ids of this tenant
-- KEYS[5]  place      number of the document created last
-- ARGV[1]  put, delete, page or oldest
-- ARGV[2]  put, delete: the id; page, oldest: the id before the first, or empty
-- ARGV[3]  put, delete: the version that it is based on (0: there is none); page, oldest: how many
-- ARGV[4]  put, delete: 1 if it is open from now on
-- ARGV[5]  put: most open ones of the tenant; 0 for any number
-- ARGV[6]  put: the value
--
-- put and delete return the new version, -1 if the version is another, -2 if there are too many.
-- page and oldest return ids, newest or oldest first.

local DOCUMENTS, PLACES, OPEN, OPENED, PLACE = unpack(KEYS)
local call = redis.call

if ARGV[1] == 'page' or ARGV[1] == 'oldest' then
  local newest, from = ARGV[1] == 'page', 0
  if ARGV[2] ~= '' then
    from = call(newest and 'ZREVRANK' or 'ZRANK', PLACES, ARGV[2])
    if not from then return {} end
    from = from + 1
  end
  return call(newest and 'ZREVRANGE' or 'ZRANGE', PLACES, from, from + ARGV[3] - 1)
end

local id, version, opens = ARGV[2], tonumber(ARGV[3]), ARGV[4] == '1'
local text = call('HGET', DOCUMENTS, id)
local current = text and tonumber(string.match(text, '^%d+')) or 0
if current ~= version or (ARGV[1] == 'delete' and current == 0) then return -1 end

if opens then
  local others = call('SCARD', OPENED) - call('SISMEMBER', OPENED, id)
  if ARGV[5] ~= '0' and others >= tonumber(ARGV[5]) then return -2 end
end
if current == 0 then call('ZADD', PLACES, call('INCR', PLACE), id) end
if opens then
  call('ZADD', OPEN, call('ZSCORE', PLACES, id), id)
  call('SADD', OPENED, id)
else
  call('ZREM', OPEN, id)
  call('SREM', OPENED, id)
end
if ARGV[1] == 'delete' then
  call('HDEL', DOCUMENTS, id)
  call('ZREM', PLACES, id)
  return 0
end
call('HSET', DOCUMENTS, id, string.format('%d ', current + 1) .. ARGV[6])
return current + 1
