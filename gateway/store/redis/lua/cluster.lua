-- cluster, version 1: the entitlements that the controller of a Kubernetes cluster publishes.
--
-- KEYS[1]  head     hash: epoch and revision of the last write; floor: whoever read less has to
--                   read all; complete: 0 between the calls of one write; at: the server's time in
--                   microseconds of which the writer's knowledge is
-- KEYS[2]  rows     hash: name -> JSON
-- KEYS[3]  changed  sorted set: names, by the revision of their last write
-- KEYS[4]  gone     sorted set: the last names that were removed, by revision
-- ARGV[1]  read or write
-- ARGV[2]  the revision that the caller knows last
-- ARGV[3]  read: how many changes one call returns at most; write: how many removed names are kept
-- write only:
-- ARGV[4]  the writer's epoch
-- ARGV[5]  1: all that was written before goes
-- ARGV[6]  1: this call completes the write
-- ARGV[7]  age of the writer's knowledge in microseconds
-- ARGV[8]  how many rows follow; then their names and JSON, then the names to remove
--
-- write returns {1, revision, rows}, {0} where ARGV[2] is not the last revision, or {-1, epoch} if
-- a newer one wrote. read returns {epoch, revision, complete, age, 1, {rows}, {removed}}, with 0
-- and no rows where the caller has to read all, or {} if nothing was written.

local HEAD, ROWS, CHANGED, GONE = unpack(KEYS)
local call = redis.call

local function whole(number) return string.format('%.0f', number) end

local clock = call('TIME')
local now = tonumber(clock[1]) * 1000000 + tonumber(clock[2])
local epoch, revision, floor, complete, at =
  unpack(call('HMGET', HEAD, 'epoch', 'revision', 'floor', 'complete', 'at'))

if ARGV[1] == 'read' then
  if not epoch then return {} end
  local later, rows, removed = '(' .. ARGV[2], {}, {}
  local many = call('ZCOUNT', CHANGED, later, '+inf') + call('ZCOUNT', GONE, later, '+inf')
  local all = tonumber(ARGV[2]) < tonumber(floor) or many > tonumber(ARGV[3])
  if not all then
    for i, name in ipairs(call('ZRANGEBYSCORE', CHANGED, later, '+inf')) do
      rows[i] = call('HGET', ROWS, name)
    end
    removed = call('ZRANGEBYSCORE', GONE, later, '+inf')
  end
  return {epoch, revision, complete, whole(math.max(0, now - at)), all and '0' or '1', rows, removed}
end

local begins, puts = ARGV[5] == '1', tonumber(ARGV[8])
if epoch and tonumber(epoch) > tonumber(ARGV[4]) then return {-1, epoch} end
if not begins and revision ~= ARGV[2] then return {0} end
if begins then call('DEL', ROWS, CHANGED, GONE) end
if begins or #ARGV > 8 then
  -- Above what any reader may know of a server that was emptied.
  revision = whole(math.max(tonumber(revision or '0') + 1, tonumber(ARGV[2]) + 1, now / 1000))
end
if begins then floor = revision end
for i = 9, 8 + 2 * puts, 2 do
  call('HSET', ROWS, ARGV[i], ARGV[i + 1])
  call('ZADD', CHANGED, revision, ARGV[i])
  call('ZREM', GONE, ARGV[i])
end
for i = 9 + 2 * puts, #ARGV do
  call('HDEL', ROWS, ARGV[i])
  call('ZREM', CHANGED, ARGV[i])
  call('ZADD', GONE, revision, ARGV[i])
end
local over = call('ZCARD', GONE) - tonumber(ARGV[3])
if over > 0 then
  local last = call('ZRANGE', GONE, over - 1, over - 1, 'WITHSCORES')[2]
  floor = whole(math.max(tonumber(floor), tonumber(last)))
  call('ZREMRANGEBYRANK', GONE, 0, over - 1)
end
call('HSET', HEAD, 'epoch', ARGV[4], 'revision', revision, 'floor', floor, 'complete', ARGV[6],
  'at', whole(now - ARGV[7]))
return {1, revision, call('HLEN', ROWS)}
